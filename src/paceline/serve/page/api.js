// Talking to the server: the models it has, and an answer as it is written.

export class ApiError extends Error {}

function headers(key) {
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

async function explained(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

export async function models(key) {
  const response = await fetch("/v1/models", { headers: headers(key) });
  if (!response.ok) throw new ApiError(await explained(response));
  return (await response.json()).data;
}

/* Yields {tokens: [{bytes, logprob}], guessed, drafted, finish, figures} as they come. */
export async function* written(body, key, signal) {
  const asked = { ...body, stream: true, logprobs: true, x_paceline: true };
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(asked), signal,
  });
  if (!response.ok) throw new ApiError(await explained(response));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const document = JSON.parse(data);
    if (document.error) throw new ApiError(document.error.message);
    const choice = document.choices[0];
    if (!choice) continue;
    const about = choice.x_paceline ?? {};
    yield {
      tokens: choice.logprobs?.content ?? [],
      guessed: about.from_draft === true,
      drafted: about.drafted ?? null,
      finish: choice.finish_reason,
      figures: choice.finish_reason ? about : null,
    };
  }
}

async function* events(stream) {
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
