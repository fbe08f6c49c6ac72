// Requests to the server: its models, and a chat completion as a stream.

export class ApiError extends Error {}

function headers(key) {
  const fields = { "Content-Type": "application/json" };
  if (key) fields.Authorization = `Bearer ${key}`;
  return fields;
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server returned status ${response.status}`;
  }
}

export async function listModels(key) {
  const response = await fetch("/v1/models", { headers: headers(key) });
  if (!response.ok) throw new ApiError(await errorMessage(response));
  return (await response.json()).data;
}

/* Yields {tokens: [{bytes, logprob}], content, reasoning, toolCalls, numTokens, fromDraft, numDraftTokens, finishReason}
   for each chunk. tokens: those whose characters are complete; numTokens: those that the engine has generated. */
export async function* streamChat(params, key, signal) {
  const body = { ...params, stream: true, logprobs: true, x_paceline: true };
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw new ApiError(await errorMessage(response));
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    const choice = chunk.choices[0];
    if (!choice) continue;
    yield {
      tokens: choice.logprobs?.content ?? [],
      content: choice.delta?.content ?? "",
      reasoning: choice.delta?.reasoning_content ?? "",
      toolCalls: choice.delta?.tool_calls ?? [],
      numTokens: choice.x_paceline?.num_tokens ?? choice.logprobs?.content?.length ?? 0,
      fromDraft: choice.x_paceline?.from_draft === true,
      numDraftTokens: choice.x_paceline?.num_draft_tokens ?? null,
      finishReason: choice.finish_reason,
    };
  }
}

async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
