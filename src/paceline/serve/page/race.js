// A race of one prompt without and with speculation. It must not flatter speculation:
// - the lanes take turns (off, on, on, off), so that a machine that warms up or slows down helps neither
// - the prompt is read once before, so that every run finds it in the prefix cache
// - what a difference of the outputs or a speed-up beyond the possible means is checked, in compare.js

import { compareOutputs, describeRace } from "./compare.js";
import { generate, requestParams } from "./generation.js";
import { streamChat } from "./api.js";
import { Answer } from "./tokens.js";

const TURNS = ["off", "on", "on", "off"];
const byId = (id) => document.getElementById(id);

function clearLanes() {
  byId("result").textContent = "";
  for (const name of ["off", "on"]) {
    byId(`lane-${name}`).replaceChildren();
    byId(`lane-${name}-summary`).textContent = "";
    byId(`lane-${name}-bar`).value = 0;
  }
}

async function readPrompt(params, signal) {
  for await (const _ of streamChat({ ...params, max_tokens: 1 }, byId("key").value, signal)) signal.throwIfAborted();
}

/* The first run of a lane is shown; the second is only timed. */
async function runLane(name, params, signal, isFirst) {
  const bar = byId(`lane-${name}-bar`);
  const element = isFirst ? byId(`lane-${name}`) : document.createElement("div");
  const result = await generate(params, signal, new Answer(element), (answer, gauges) => {
    bar.value = (isFirst ? 0 : 0.5) + answer.count / params.max_tokens / 2;
    const run = isFirst ? "first" : "second";
    byId(`lane-${name}-summary`).textContent = `${run} run: ${answer.count} tokens, ${gauges.steps} steps`;
  });
  bar.value = isFirst ? 0.5 : 1;
  byId(`lane-${name}-summary`).textContent = result.gauges.summary;
  return result;
}

/* Both runs together are the speed. The first run alone says how many tokens a step gave: a method that remembers
   earlier outputs would have seen this one before the second. */
function totals(runs) {
  const [first] = runs.map((run) => run.gauges);
  const sum = (field) => runs.reduce((total, run) => total + run.gauges[field], 0);
  const seconds = sum("seconds");
  const speed = seconds > 0 ? sum("timedTokens") / seconds : 0;
  return { speed, steps: first.steps, tokensPerStep: first.tokensPerStep, drafted: first.drafted };
}

const SEVERITY = ["same", "near-tie", "different"];
const worst = (comparisons) =>
  comparisons.reduce((worse, next) => (SEVERITY.indexOf(next.kind) > SEVERITY.indexOf(worse.kind) ? next : worse));

function markDifference(index) {
  for (const name of ["off", "on"]) byId(`lane-${name}`).children[index]?.classList.add("differs");
}

export async function race(model, prompt, rounding, signal) {
  clearLanes();
  const messages = [{ role: "user", content: prompt }];
  const params = Object.fromEntries(
    ["off", "on"].map((name) => [name, { ...requestParams(model, messages, name === "on", 0), top_logprobs: 2 }]),
  );
  const runs = { off: [], on: [] };
  await readPrompt(params.off, signal);
  for (const name of TURNS) runs[name].push(await runLane(name, params[name], signal, !runs[name].length));
  const [plain] = runs.off;
  const comparison = worst(
    runs.on.map((run) => compareOutputs(plain.answer.tokens, run.answer.tokens, rounding.bound)),
  );
  if (comparison.kind !== "same") markDifference(comparison.index);
  const lanes = { off: totals(runs.off), on: totals(runs.on) };
  for (const name of ["off", "on"]) {
    byId(`lane-${name}-bar`).value = 1;
    byId(`lane-${name}-summary`).textContent = runs[name][0].gauges.describe(lanes[name].speed);
  }
  runs.on.at(-1).gauges.showTotals(); // the last run was one without speculation
  byId("result").textContent = describeRace(lanes.off, lanes.on, comparison, rounding);
}
