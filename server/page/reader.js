/* Owns the thread that reads streams: drawing the page must not delay when a token counts as come. One stream at a time. */

import { access, readStream } from "./api.js";

let stop = null;

onmessage = async ({ data }) => {
  if (data === "stop") return stop.abort();
  stop = new AbortController();
  access.key = data.key;
  try {
    postMessage({ end: await readStream(data.url, data.body, stop.signal, (news) => postMessage({ news })) });
  } catch (error) {
    stop.abort(); // an answer that cannot be read need not be made
    postMessage({ error: { message: error.message, status: error.status } });
  }
};
