// Calls of the server, streamed. The access token is in its field and nowhere else.

import { $ } from "./page.js";

/** An error that the server describes, or that has a cause in the page's fields. */
export class Refused extends Error {}

/** The headers of a call, with the access token if there is one. */
export function headers() {
  const token = $("token").value.trim();
  return { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
}

/** Yields the events of a stream. Raises Refused with the server's words. */
export async function* events(path, body, signal) {
  const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const answer = await reached(fetch(path, request), signal);
  if (!answer.ok) throw await refusal(answer);
  let rest = "";
  for await (const chunk of decoded(answer.body, signal)) {
    const parts = (rest + chunk).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message);
      yield event;
    }
  }
  throw new Refused("The stream ended unexpectedly.");
}

/** What a promise of the network returns; its error in words. That of a stop stays as it is. */
async function reached(promise, signal) {
  try {
    return await promise;
  } catch (error) {
    throw signal.aborted ? error : new Refused(`The server cannot be reached: ${error.message}`);
  }
}

async function* decoded(stream, signal) {
  const [reader, decoder] = [stream.getReader(), new TextDecoder()];
  for (;;) {
    const { done, value } = await reached(reader.read(), signal);
    if (done) return;
    yield decoder.decode(value, { stream: true });
  }
}

async function refusal(answer) {
  let said = answer.statusText;
  try {
    said = (await answer.json()).error.message;
  } catch {
    // Possibly a proxy's answer, of which only the status is shown.
  }
  if (answer.status === 401) {
    $("settings").open = $("access").open = true;
    $("token").focus();
  }
  return new Refused(`${answer.status}: ${said}`);
}
