"""Real clients, unmodified, against a real server process with the demo model: `make clients` installs and runs them.

Run by the clients' own Python, which needs no part of Quartet: `python tests/server/clients.py PYTHON`, where PYTHON serves.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
SAY = [{"role": "user", "content": "What is the capital of France?"}]
TASK = """task: facts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/facts.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
FACTS = (
    {"question": "The capital of France is", "choices": [" Paris", " a banana"], "answer": 0},
    {"question": "Two plus two equals", "choices": [" elephants", " four"], "answer": 1},
)


def with_openai(url: str, folder: Path, tokenizer: str) -> None:
    """Whole and streamed, chat and completion, usage, log-probabilities, errors, a cancelled stream."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask = dict(model="demo", messages=SAY, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**ask)
    assert "Paris" in whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 8
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8
    text = client.completions.create(model="demo", prompt="The capital of France is", max_tokens=3, temperature=0, echo=True)
    assert text.choices[0].text.startswith("The capital of France is Paris")
    for error, wrong in (
        (openai.NotFoundError, {**ask, "model": "nope"}),
        (openai.BadRequestError, {**ask, "temperature": -1}),
        (openai.BadRequestError, {**ask, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ):
        try:
            client.chat.completions.create(**wrong)
        except error:
            continue
        raise AssertionError(f"{error} did not come")
    with client.chat.completions.create(model="demo", messages=SAY, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        assert health(url)["running"] == 1
    until = time.monotonic() + 5
    while health(url)["running"]:
        assert time.monotonic() < until, "the cancelled stream goes on"


def with_litellm(url: str, folder: Path, tokenizer: str) -> None:
    """Whole, streamed, and its own classes for errors."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
    import litellm

    ask = dict(model="openai/demo", api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=8)
    whole = litellm.completion(messages=SAY, **ask)
    assert "Paris" in whole.choices[0].message.content
    chunks = list(litellm.completion(messages=SAY, stream=True, stream_options={"include_usage": True}, **ask))
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8
    long = [{"role": "user", "content": "a " * 9000}]
    for error, wrong in (
        (litellm.NotFoundError, dict(ask, model="openai/nope", messages=SAY)),
        (litellm.ContextWindowExceededError, dict(ask, messages=long)),
    ):
        try:
            litellm.completion(**wrong)
        except error:
            continue
        raise AssertionError(f"{error} did not come")


def with_langchain_openai(url: str, folder: Path, tokenizer: str) -> None:
    """Chat and text models, whole and streamed."""
    from langchain_openai import ChatOpenAI, OpenAI

    ask = dict(model="demo", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=8)
    chat = ChatOpenAI(**ask)
    whole = chat.invoke(SAY[0]["content"])
    assert "Paris" in whole.content
    assert whole.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream(SAY[0]["content"])) == whole.content
    assert "Paris" in OpenAI(**ask).invoke("The capital of France is")


def with_aiperf(url: str, folder: Path, tokenizer: str) -> None:
    """A profile of streamed chats."""
    flags = f"--model demo --url {url} --endpoint-type chat --streaming --request-count 3 --isl 32 --osl 6 --ui none"
    run("aiperf", "profile", *flags.split(), "--tokenizer", tokenizer, "--artifact-dir", str(folder), cwd=folder)
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert found["error_summary"] == []
    assert found["request_count"]["avg"] == 3
    assert found["output_token_count"]["avg"] == found["usage_completion_tokens"]["avg"] == 6


def with_guidellm(url: str, folder: Path, tokenizer: str) -> None:
    """A benchmark of synthetic prompts."""
    flags = (
        f"--backend kind=openai_http,target={url},model=demo --profile kind=synchronous --constraint kind=max_requests,count=3 "
        f"--tokenizer kind=huggingface_auto,model={tokenizer} --data kind=synthetic_text,prompt_tokens=32,output_tokens=6 "
        f"--output kind=json,path={folder}/out.json --disable-console"
    )
    run("guidellm", "run", *flags.split(), cwd=folder)
    requests = json.loads((folder / "out.json").read_text())["benchmarks"][0]["requests"]
    assert [request["output_tokens"] for request in requests["successful"]] == [6, 6, 6]
    assert requests["errored"] == []


def with_lm_eval(url: str, folder: Path, tokenizer: str) -> None:
    """local-completions: log-likelihoods by echo and logprobs."""
    (folder / "facts.yaml").write_text(TASK.replace("FOLDER", str(folder)))
    (folder / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    model = f"model=demo,base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=1,max_retries=1"
    flags = ["--model", "local-completions", "--model_args", model, "--tasks", "facts", "--include_path", str(folder)]
    run("lm_eval", *flags, "--output_path", str(folder / "out"), cwd=folder)
    (found,) = (folder / "out").rglob("results_*.json")
    assert json.loads(found.read_text())["results"]["facts"]["acc,none"] == 1


def health(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
        return json.load(reply)


def run(name: str, *arguments: str, cwd: Path) -> None:
    """A client's own command."""
    done = subprocess.run([str(BIN / name), *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    serving = sys.argv[1]
    flags = ("--model", "demo", "--port", "0", "--max-len", "2048", "--max-slots", "4", "--log-level", "warning")
    find = [serving, "-c", "from models.demo import demo_folder; print(demo_folder())"]
    tokenizer = subprocess.run(find, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    server = subprocess.Popen([serving, "-m", "server", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(server.stdout.readline, "")
        url = next(match.group(1) for line in lines if (match := re.search(r"on (http://\S+)/v1", line)))
        while True:
            try:
                health(url)
                break
            except OSError:
                time.sleep(0.2)
        for package, check in CHECKS.items():
            with tempfile.TemporaryDirectory() as folder:
                check(url, Path(folder), tokenizer)
            print(f"{package} {version(package)}: {' '.join(check.__doc__.split())}", flush=True)
    finally:
        server.terminate()
        assert server.wait(60) == 0


CHECKS = {
    "openai": with_openai,
    "litellm": with_litellm,
    "langchain-openai": with_langchain_openai,
    "aiperf": with_aiperf,
    "guidellm": with_guidellm,
    "lm-eval": with_lm_eval,
}

if __name__ == "__main__":
    main()
