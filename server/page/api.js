/* Owns the way to the server: key, errors in words, the events of a stream and when they came. Knows nothing of the page. */

export class ApiError extends Error {
  /** @param {string} message a sentence to show @param {number} status HTTP status; 0: the server could not be reached */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const LOST = "The server does not answer. Is it still running?";
const CUT = "The connection broke in the middle of the answer. What arrived is kept.";

export const access = { key: globalThis.sessionStorage?.getItem("quartet-key") ?? null }; // workers have no session storage

export function keepKey(key) {
  access.key = key;
  sessionStorage.setItem("quartet-key", key);
}

async function call(url, body, signal) {
  const headers = {};
  if (access.key) headers.authorization = `Bearer ${access.key}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(url, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw signal?.aborted ? error : new ApiError(LOST);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new ApiError(told?.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

export const getRuntime = async () => (await call("v1/runtime")).json();
export const setRuntime = async (mode) => (await call("v1/runtime", mode)).json();

/**
 * Read one streamed answer.
 * @param {(news: {text: string, ms: number, count: number, context: number}) => void} tell of each read: its text, `count` gaps
 *   of `ms` each, positions read for the last of them. Several tokens of one read share its time; the first has no gap.
 * @returns {Promise<{firstMs: number, tokens: number}>}
 */
export async function readStream(url, body, signal, tell) {
  const asked = performance.now();
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  const response = await call(url, { ...body, stream: true, stream_options }, signal);
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
    let usage = null, text = "";
    for (const event of events) {
      const data = event.slice("data: ".length);
      if ((done = data === "[DONE]")) break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 500);
      const [choice] = chunk.choices;
      usage = chunk.usage ?? usage;
      text += (choice?.delta ? choice.delta.content : choice?.text) ?? "";
    }
    const count = Math.max(0, (usage?.completion_tokens ?? 0) - tokens), first = firstMs === null && count > 0;
    tell({ text, ms: (now - last) / count, count: first ? 0 : count, context: usage?.total_tokens });
    if (first) firstMs = now - asked;
    if (count) last = now;
    tokens += count;
  }
  return { firstMs, tokens };
}
