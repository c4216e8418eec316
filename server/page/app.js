/* Owns the page's wiring: what the server is doing, who may act when, and which part is told of what. */

import { ApiError, getRuntime, keepKey, setRuntime } from "./api.js";
import { Chat } from "./chat.js";
import { $, say } from "./dom.js";
import { drawLayer } from "./layer.js";
import { Live } from "./live.js";
import { modeName, sameMode, show } from "./meter.js";
import { Race } from "./race.js";

const LOOK_MS = 3000;
const TAKES = {
  chat: "",
  text: "This model knows no chats: it goes on from your text.",
  ids: "This model has no tokenizer: it reads the bytes of your text and answers in token ids.",
};
let runtime = null; // what GET /v1/runtime last told

const live = new Live(), race = new Race(), chat = new Chat(live);

/** Take what the server tells of itself. */
function take(told) {
  const first = runtime?.model !== told.model || runtime.device_name !== told.device_name; // or another server has come
  const changed = first || !sameMode(runtime, told) || told.stall_ms !== undefined;
  runtime = told;
  live.take(told);
  state("ready", chat.streaming || race.running ? "streaming" : "ready");
  if (first) {
    say($("facts"), `${told.model} · ${told.device_name} · ${told.dtype} · ${told.layers} layers`);
    document.title = `${told.model} · Quartet`;
    drawLayer($("layer"), told);
    race.lay(told);
    say($("takes"), TAKES[told.prompts]);
  }
  document.body.dataset.ops = told.ops;
  const refused = new Set(told.modes.map((mode) => mode.reason).filter(Boolean));
  for (const input of document.querySelectorAll("#switch input")) {
    input.checked = told[input.name] === input.value;
    const mode = { ops: told.ops, graph: told.graph, [input.name]: input.value };
    input.disabled = race.running || !told.modes.find((each) => sameMode(each, mode)).available;
  }
  const launches = `${told.launches_per_step} kernels a token, ${told.host_launches_per_step} launched by the host`;
  const stood = told.stall_ms === undefined ? "" : ` Streams stood still for ${told.stall_ms < 0.01 ? "under 0.01" : show(told.stall_ms)} ms.`;
  if (changed) say($("why"), refused.size ? `Not here: ${[...refused].join("; ")}.` : `${modeName(told)}: ${launches}.${stood}`);
  enable();
}

function state(kind, text) {
  $("state").dataset.state = kind;
  say($("state"), text);
}

/** Who may act now. */
function enable() {
  const busy = chat.streaming || race.running;
  say($("send"), chat.streaming ? "Stop" : "Send");
  $("send").disabled = race.running || !runtime;
  say($("race"), race.running ? "Stop" : "Race");
  $("race").disabled = chat.streaming || !runtime;
  for (const button of document.querySelectorAll(".again, #ideas button")) button.disabled = busy || !runtime;
  if (runtime && $("state").dataset.state === "ready") say($("state"), busy ? "streaming" : "ready");
}

/** An error of a call that no answer shows. */
function tell(error) {
  if (error.status === 401) {
    say($("lock-error"), $("lock").open && $("key").value ? "That is not the key." : "");
    if (!$("lock").open) $("lock").showModal();
  } else if (error instanceof ApiError && (error.status === 0 || error.status >= 500)) {
    state(error.status ? "starting" : "lost", error.message);
  } else {
    say($("why"), error.message);
  }
  if (!(error instanceof ApiError)) console.error(error);
}

async function look() {
  try {
    take(await getRuntime());
    if ($("lock").open) $("lock").close();
  } catch (error) {
    tell(error);
  }
}

/** Play something that keeps the page busy, from its first moment to its last. */
async function during(work) {
  const playing = work();
  enable();
  await playing.catch(tell);
  enable();
  look();
}

const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
const fields = () => ({ temperature: number("temperature"), seed: number("seed"), max_tokens: number("limit") });

function send(text) {
  if (!$("ask").reportValidity()) return;
  during(() => chat.send(text, runtime.prompts, fields(), $("system").value.trim()));
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.streaming) return chat.stop();
  const text = $("prompt").value.trim();
  if (!text || $("send").disabled) return;
  $("prompt").value = "";
  grow();
  send(text);
});

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

$("prompt").addEventListener("input", grow);
$("ask").addEventListener("invalid", () => ($("settings").open = true), true); // what is wrong must be seen
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat.streaming) $("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") [chat, race].forEach((each) => each.stop());
});
$("log").addEventListener("click", (event) => {
  if (!event.target.matches(".again")) return;
  $("send").focus(); // the button goes, the one that stops stays
  during(() => chat.retry(runtime.prompts, fields(), $("system").value.trim()));
});
$("ideas").addEventListener("click", (event) => {
  if (!event.target.matches("button")) return;
  $("prompt").focus();
  send(event.target.textContent);
});
$("clear").addEventListener("click", () => chat.clear());
$("switch").addEventListener("change", async ({ target }) => {
  try {
    take(await setRuntime({ [target.name]: target.value }));
  } catch (error) {
    tell(error);
    take(runtime);
  }
});
$("race").addEventListener("click", () => {
  if (race.running) race.stop();
  else during(() => race.run(runtime, chat.asked, live, take));
});
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(race.text);
    say($("copy"), "Copied");
  } catch {
    getSelection().selectAllChildren($("results")); // no clipboard without https: the browser's own copy is one key away
    say($("copy"), "Selected");
  }
  setTimeout(() => say($("copy"), "Copy"), 2000);
});
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey($("key").value);
  look();
});
$("lock").addEventListener("cancel", (event) => event.preventDefault());

const THEMES = ["auto", "light", "dark"];
function theme(name) {
  document.documentElement.dataset.theme = name;
  say($("theme"), `Theme: ${name}`);
  live.redraw();
}
$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("quartet-theme", next);
  theme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.redraw());
theme(localStorage.getItem("quartet-theme") ?? "auto");

look();
setInterval(() => document.hidden || $("lock").open || look(), LOOK_MS);
