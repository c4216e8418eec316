"""The record of the machine: what slows a GPU, read off nvidia-smi's line; and processes that play code of ours."""

import subprocess

import pytest

from bench import session


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("0x0000000000000000", []),
        ("0x0000000000000001", ["idle"]),
        ("0x0000000000000044", ["software power cap", "hardware thermal"]),
        ("[N/A]", None),
    ],
)
def test_reasons_are_told_in_words(mask, words):
    assert session.slowed_by(mask) == words


def test_a_gpus_state_is_read_off_one_line(monkeypatch):
    line = "580.159, 1980, 3201, 41, 123.45, 0x0000000000000004"
    monkeypatch.setattr(session, "_output", lambda *command: line)
    state = session.gpu_state()
    assert (state["driver"], state["sm_mhz"], state["memory_mhz"]) == ("580.159", 1980.0, 3201.0)
    assert (state["temperature_c"], state["power_w"], state["slowed_by"]) == (41.0, 123.45, ["software power cap"])


def test_without_nvidia_smi_there_is_no_state(monkeypatch):
    monkeypatch.setattr(session, "_output", lambda *command: None)
    assert session.gpu_state() is None


def test_code_of_ours_is_played_whatever_the_folder_holds(tmp_path):
    """Beside a `models.py` of the user's every start ended with an error, and `--start` told that as its figure."""
    (tmp_path / "models.py").write_text("raise SystemExit('not ours')")
    command = session.playing("import models; print(models.__all__)")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert "find_model" in done.stdout, done.stderr
