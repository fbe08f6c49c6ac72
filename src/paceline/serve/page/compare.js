// Two greedy outputs of one prompt, and what a race may say about them. No browser is needed: node runs this file too.

const isSame = (token, other) => token.token === other.token && String(token.bytes) === String(other.bytes);

/* How far a lane ranks the other lane's token from its own. `other` is missing where that lane has ended: an end token
   has no bytes. Infinity: it is not among the two likeliest tokens. */
function gapTo(token, other) {
  const rival = token.top_logprobs.find((top) => (other ? isSame(top, other) : top.bytes === null));
  return rival ? Math.abs(token.logprob - rival.logprob) : Infinity;
}

/* {kind, index, gap, off, on}. off, on: tokens with their top_logprobs. bound: what rounding can explain.

   Both lanes must find the two tokens nearly equally likely: a lane that prefers its token clearly has computed
   something else. */
export function compareOutputs(off, on, bound) {
  const shorter = Math.min(off.length, on.length);
  let index = 0;
  while (index < shorter && isSame(off[index], on[index])) index += 1;
  if (index === off.length && index === on.length) return { kind: "same" };
  const pairs = [[off[index], on[index]], [on[index], off[index]]].filter(([token]) => token);
  const gap = Math.max(...pairs.map(([token, other]) => gapTo(token, other)));
  return { kind: gap <= bound ? "near-tie" : "different", index, gap, off: off[index], on: on[index] };
}

const quoted = (token) => (token ? `“${token.token}”` : "the end");

function describeDifference(comparison, rounding) {
  const place = `token ${comparison.index + 1}: ${quoted(comparison.off)} without speculation, ${quoted(comparison.on)} with it`;
  const bound = `rounding in ${rounding.dtype} explains ${rounding.bound}`;
  if (comparison.kind === "near-tie") {
    return `Another output from ${place}. It is a near-tie: their log-probabilities differ by ${comparison.gap.toPrecision(2)}, ${bound}.`;
  }
  const gap = comparison.gap === Infinity ? "by more than the two likeliest tokens" : `by ${comparison.gap.toPrecision(2)}`;
  return `A different output from ${place}. This is no near-tie: their log-probabilities differ ${gap}, ${bound}. `
    + "No speed-up is shown; please report this.";
}

/* A step takes at least as long as a pass without draft tokens: a speed-up above τ is not due to speculation. */
export function describeSpeed(off, on) {
  if (!(off.speed > 0 && on.speed > 0)) return "The outputs are too short to be timed.";
  const speedup = on.speed / off.speed;
  const measured = `${speedup.toFixed(2)}× speed`;
  if (!on.steps) return `${measured}; the engine does not report its steps.`;
  if (!on.drafted) return `${measured} without any draft token: the difference is noise.`;
  if (speedup > on.tokensPerStep) {
    return `${measured} measured, more than ${on.tokensPerStep.toFixed(2)} tokens per step can give: the excess is noise.`;
  }
  return `${measured}, ${on.steps} steps instead of ${off.steps}.`;
}

/* The sentence under a race. off, on: {speed, steps, tokensPerStep, drafted}. rounding: {dtype, bound}. */
export function describeRace(off, on, comparison, rounding) {
  if (comparison.kind === "different") return describeDifference(comparison, rounding);
  const output = comparison.kind === "same" ? "It is the same output." : describeDifference(comparison, rounding);
  return `${describeSpeed(off, on)} ${output}`;
}
