// A group to read: the prompt and its reference answer beside the completions; the same prompt in other steps and
// runs.

const reading = { measure: "none", marks: false }; // how completions are shown

function turnsView(turns) {
  return el(
    "ol",
    { class: "turns" },
    turns.map((turn) =>
      el(
        "li",
        { class: `turn role-${/^(user|assistant|system|tool)$/.test(turn.role) ? turn.role : "other"}` },
        el("span", { class: "role" }, foreign(turn.role)),
        longText(turn.content ?? ""),
      ),
    ),
  );
}

function promptView(prompt) {
  const plain = prompt.messages?.length ? turnsView(prompt.messages) : longText(prompt.text);
  return el(
    "div",
    { class: "prompt" },
    el("h4", {}, "Prompt"),
    plain,
    prompt.answer !== null
      ? [el("h4", {}, "Reference answer"), el("div", { class: "answer" }, longText(prompt.answer))]
      : null,
  );
}

// The best completion, the worst, then the others from best to worst.
function bestAndWorstFirst(completions) {
  const order = completions
    .map((_, at) => at)
    .sort((a, b) => (completions[b].reward ?? -Infinity) - (completions[a].reward ?? -Infinity) || a - b);
  if (order.length < 3 || completions[order[0]].reward === completions[order[order.length - 1]].reward) return order;
  return [order[0], order[order.length - 1], ...order.slice(1, -1)];
}

function completionCard(completion, at, mark) {
  const { advantage } = completion;
  const tone = !isNumber(advantage) || advantage === 0 ? "none" : advantage > 0 ? "up" : "down";
  return el(
    "article",
    { class: `completion tone-${tone}`, "data-completion": at, "aria-label": `Completion ${at + 1}` },
    el("h4", {}, `Completion ${at + 1}`, mark ? el("span", { class: "word" }, mark) : null),
    scores(completion),
    el("p", { class: "made-by" }, madeBy(completion)),
    completionBody(completion),
  );
}

// The rewards and the advantage of a completion.
function scores({ reward, rewards, advantage }) {
  const parts = Object.entries(rewards);
  const shown = parts.length > 1 || (parts.length === 1 && parts[0][1] !== reward) ? parts : [];
  const rows = [["reward", short(reward)], ...shown.map(([name, value]) => [name, short(value)])];
  rows.push(["advantage", isNumber(advantage) ? signed(advantage) : "–"]);
  return el(
    "dl",
    { class: "numbers" },
    rows.map(([name, value]) => el("div", {}, el("dt", {}, foreign(name)), el("dd", { "data-number": name }, value))),
  );
}

// How a completion was sampled, in a line.
function madeBy(completion) {
  const status = completion.status === "trained" ? [] : [" · ", foreign(completion.status)];
  const finish = [" · finish ", foreign(completion.finish)];
  const weights = completion.version > 0 ? ` · weights before step ${count(completion.version)}` : "";
  return [plural(completion.length, "token"), finish, status, weights];
}

function completionBody(completion) {
  const measure = measuresOf(completion).includes(reading.measure) ? reading.measure : "none";
  if (completion.tokens && (measure !== "none" || reading.marks)) return tokenView(completion, measure, reading.marks);
  if (completion.episode) return turnsView(completion.episode);
  return longText(completion.text);
}

function readingBar(group, redraw) {
  const names = Object.keys(MEASURES).filter((name) =>
    group.completions.some((completion) => measuresOf(completion).includes(name)),
  );
  const current = names.includes(reading.measure) ? reading.measure : "none";
  const select = choices(
    names.map((name) => [name, MEASURES[name].label]),
    current,
    { "data-control": "measure" },
  );
  select.addEventListener("change", () => {
    reading.measure = select.value;
    setState({ color: select.value });
    redraw("measure");
  });
  const marks = checkbox(
    reading.marks,
    (on) => {
      reading.marks = on;
      setState({ marks: on ? 1 : "" });
      redraw("marks");
    },
    "marks",
  );
  const hasMarks = group.completions.some((one) => one.clipped?.some(Boolean) || one.mask?.some((value) => !value));
  return el(
    "div",
    { class: "bar" },
    labelled("Color of the tokens", select),
    el("label", { class: "check" }, marks, "Whitespace and tokens"),
    el(
      "div",
      { class: "legends" },
      tokenLegend(current),
      hasMarks ? el("span", { class: "legend" }, markLegend()) : null,
      current === "none"
        ? null
        : el("span", { class: "help" }, "Point at a token, or use the arrow keys, for its numbers."),
    ),
  );
}

const meanOf = (values) => {
  const numbers = values.filter(isNumber);
  return numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : null;
};
const groupReward = (group) => meanOf(group.completions.map((completion) => completion.reward));

function bestOf(group) {
  return group.completions.reduce((best, one) => ((one.reward ?? -Infinity) > (best.reward ?? -Infinity) ? one : best));
}

// All groups of one prompt in a run, by step: the mean reward as a curve, and the best completion of each.
function throughSteps(run, prompt, current) {
  const groups = run.groups.filter((group) => group.prompt === prompt).sort((a, b) => a.step - b.step);
  if (groups.length < 2) return null;
  const rewards = groups.map(groupReward);
  const [first, last] = [groups[0], groups[groups.length - 1]];
  const details = el(
    "details",
    { class: "through" },
    el("summary", {}, `This prompt through the steps (${groups.length} groups)`),
    rewardCurve(run, groups, rewards),
    el(
      "p",
      { class: "quiet" },
      `Mean reward of the group: ${short(rewards[0])} at step ${first.step}, `,
      `${short(rewards[rewards.length - 1])} at step ${last.step}. Below, the best completion of each group.`,
    ),
    el(
      "ol",
      { class: "history" },
      groups.slice(0, 200).map((group) => groupRow(run, group, group === current)),
    ),
  );
  details.open = state.through === "1";
  details.addEventListener("toggle", () => setState({ through: details.open ? 1 : "" }));
  return details;
}

function rewardCurve(run, groups, rewards) {
  const numbers = rewards.filter(isNumber);
  return curve(
    groups.map((group) => group.step),
    rewards,
    {
      low: Math.min(0, ...numbers),
      high: Math.max(1, ...numbers),
      first: groups[0].step,
      last: groups[groups.length - 1].step,
      color: run.color,
      label: "mean reward by step",
      width: 480,
    },
  );
}

// A group of the history: its step, its mean reward and its best completion.
function groupRow(run, group, isCurrent) {
  const best = bestOf(group);
  return el(
    "li",
    {},
    groupLink(run, group, isCurrent),
    el("span", { class: "quiet" }, ` mean ${short(groupReward(group))}, best ${short(best.reward)}: `),
    el("span", { class: "excerpt" }, foreign(excerpt(best.text, 200))),
  );
}

function groupLink(run, group, isCurrent) {
  const open = () => openGroup(run, group);
  return button(`Step ${group.step}`, open, { class: "link", "aria-current": isCurrent ? "true" : null });
}

// The same prompt in the other runs, at the recorded step closest to this one.
function otherRuns(run, prompt, step) {
  if (!several()) return null;
  const distance = (group) => Math.abs(group.step - step);
  const found = page.runs.flatMap((other) => {
    const groups = other.groups.filter((group) => group.prompt === prompt);
    return groups.length ? [[other, groups.reduce((a, b) => (distance(b) < distance(a) ? b : a))]] : [];
  });
  if (found.length < 2) return null;
  const columns = found.map(([other, group]) => runColumn(other, group, other === run && group.step === step));
  const name = "The same prompt in other runs";
  return el(
    "section",
    { class: "other-runs" },
    el("h3", {}, `The same prompt in ${found.length} runs`),
    el("div", { class: "columns", tabindex: "0", role: "region", "aria-label": name }, columns),
  );
}

const SHOWN_OF_OTHER_RUN = 4;

function runColumn(run, group, isCurrent) {
  const best = bestAndWorstFirst(group.completions).slice(0, SHOWN_OF_OTHER_RUN);
  const item = ({ reward, text }) =>
    el("li", {}, el("span", { class: "quiet" }, `reward ${short(reward)} `), longText(text.slice(0, 3000)));
  return el(
    "div",
    { class: "column" },
    el("h4", {}, swatch(run.color, run.dash), foreign(runLabel(run))),
    el(
      "p",
      {},
      groupLink(run, group, isCurrent),
      el("span", { class: "quiet" }, ` mean reward ${short(groupReward(group))}`),
    ),
    el(
      "ol",
      { class: "plain" },
      best.map((at) => item(group.completions[at])),
    ),
  );
}
