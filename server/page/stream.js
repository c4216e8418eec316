/* Owns the page's side of the reading thread, and the form in which messages are put to a model. */

import { access, ApiError, LOST } from "./api.js";

const urls = globalThis.trustedTypes?.createPolicy("reader", { createScriptURL: (url) => url });
const worker = new Worker(urls?.createScriptURL("page/reader.js") ?? "page/reader.js", { type: "module" });

/** Path and fields: a model that knows no chats gets them as text, one without a tokenizer as bytes. */
function put(prompts, messages, fields) {
  if (prompts === "chat") return ["v1/chat/completions", { ...fields, messages }];
  const text = messages.map((message) => message.content).join("\n"), bytes = [...new TextEncoder().encode(text)];
  return ["v1/completions", { ...fields, max_tokens: fields.max_tokens ?? 256, prompt: prompts === "text" ? text : bytes }];
}

/**
 * Stream one answer.
 * @param {"chat" | "text" | "ids"} prompts what the model takes, as GET /v1/runtime tells
 * @param {object[]} messages of a chat @param {object} fields further ones of the request
 * @param tell see `readStream`, which also says what the promise brings
 */
export function stream(prompts, messages, fields, signal, tell) {
  const [path, body] = put(prompts, messages, fields);
  return new Promise((resolve, reject) => {
    worker.onmessage = ({ data: { news, end, error } }) => {
      if (news) tell(news);
      else if (end) resolve(end);
      else reject(error.status === undefined ? new Error(error.message) : new ApiError(error.message, error.status));
    };
    worker.onerror = () => reject(new ApiError(LOST));
    signal.onabort = () => worker.postMessage("stop");
    worker.postMessage({ url: new URL(path, document.baseURI).href, body, key: access.key });
  });
}
