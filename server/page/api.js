/* Owns the way to the server: key, errors in words, the stream of a chat and when its tokens came. Knows nothing of the page. */

export class ApiError extends Error {
  /** @param {string} message a sentence to show @param {number} status HTTP status; 0: the server could not be reached */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const LOST = "The server does not answer. Is it still running?";
const CUT = "The connection broke in the middle of the answer. What arrived is kept.";

let key = sessionStorage.getItem("quartet-key");

export function setKey(value) {
  key = value;
  sessionStorage.setItem("quartet-key", value);
}

async function call(path, body, signal) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw signal?.aborted ? error : new ApiError(LOST);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new ApiError(told?.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

export const getRuntime = async () => (await call("v1/runtime")).json();
export const setRuntime = async (mode) => (await call("v1/runtime", mode)).json();

/** Path and fields that say the messages to a model: to one that knows no chats as text, and without a tokenizer as bytes. */
function prompt(prompts, messages, fields) {
  if (prompts === "chat") return ["v1/chat/completions", { ...fields, messages }];
  const text = messages.map((message) => message.content).join("\n"), bytes = [...new TextEncoder().encode(text)];
  return ["v1/completions", { ...fields, max_tokens: fields.max_tokens ?? 256, prompt: prompts === "text" ? text : bytes }];
}

/**
 * Stream one answer.
 * @param {"chat" | "text" | "ids"} prompts what the model takes, as GET /v1/runtime tells
 * @param {object[]} messages of a chat @param {object} fields further ones of the request
 * @param {(text: string) => void} onText
 * @param {(ms: number, count: number, context: number) => void} onTokens `count` tokens came, `ms` apart; `context` positions
 *   were read for the last of them. A read that brings several tokens counts as so many gaps, each an equal part of its time.
 * @returns {Promise<{firstMs: number, tokens: number}>}
 */
export async function stream(prompts, messages, fields, signal, onText, onTokens) {
  const asked = performance.now();
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  const [path, said] = prompt(prompts, messages, fields);
  const response = await call(path, { ...said, stream: true, stream_options }, signal);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "", tokens = 0, firstMs = null, last = 0, done = false;
  while (!done) {
    const read = await reader.read().catch((error) => {
      throw signal.aborted ? error : new ApiError(CUT);
    });
    const now = performance.now();
    if (read.done) throw new ApiError(CUT);
    const events = (rest + decoder.decode(read.value, { stream: true })).split("\n\n");
    rest = events.pop();
    let usage = null;
    for (const event of events) {
      const data = event.slice("data: ".length);
      if ((done = data === "[DONE]")) break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 500);
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      const text = choice?.delta ? choice.delta.content : choice?.text;
      if (text) onText(text);
    }
    const count = (usage?.completion_tokens ?? 0) - tokens;
    if (count <= 0) continue;
    if (firstMs === null) firstMs = now - asked;
    else onTokens((now - last) / count, count, usage.total_tokens);
    tokens += count;
    last = now;
  }
  return { firstMs, tokens };
}
