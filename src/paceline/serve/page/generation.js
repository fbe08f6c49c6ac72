// One answer: its request, its tokens on the page, its statistics.

import { streamChat } from "./api.js";
import { Gauges } from "./gauges.js";
import { Answer } from "./tokens.js";

const byId = (id) => document.getElementById(id);

function speculativeParams(speculate) {
  if (!speculate) return { method: "none", num_draft_tokens: 0 };
  const k = byId("num-draft-tokens").value;
  return { method: byId("method").value, num_draft_tokens: k === "auto" ? "auto" : Number(k) };
}

export function requestParams(model, messages, speculate, temperature) {
  const maxTokens = Math.max(1, Math.round(Number(byId("max-tokens").value)) || 256);
  return { model, messages, temperature, max_tokens: maxTokens, speculative: speculativeParams(speculate) };
}

/* Shows an answer as it arrives. Nothing that arrives after the abort is shown or counted. */
export async function generate(params, signal, element, onChunk = () => {}) {
  const answer = new Answer(element);
  const gauges = new Gauges();
  for await (const chunk of streamChat(params, byId("key").value, signal)) {
    signal.throwIfAborted();
    for (const token of chunk.tokens) answer.add(token, chunk.fromDraft);
    if (chunk.tokens.length) gauges.add(chunk);
    onChunk(answer, gauges);
  }
  signal.throwIfAborted();
  gauges.finish();
  return { answer, gauges };
}
