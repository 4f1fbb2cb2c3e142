// A group to read: the prompt and its reference answer beside the completions; the same prompt in other steps and runs.

const reading = { measure: null, marks: false }; // how completions are shown; measure: null for the choice by default

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

function completionCard(entry, completion, at, mark) {
  const numbers = [
    ["reward", short(completion.reward)],
    ...Object.entries(completion.rewards)
      .filter(([name]) => Object.keys(completion.rewards).length > 1 || name !== "reward")
      .map(([name, value]) => [name, short(value)]),
    ["advantage", isNumber(completion.advantage) ? signed(completion.advantage) : "–"],
    ["length", plural(completion.length, "token")],
    ["finish", completion.finish],
    ["status", completion.status],
    ["weights", `version ${completion.version}`],
  ];
  const tone =
    !isNumber(completion.advantage) || completion.advantage === 0 ? "none" : completion.advantage > 0 ? "up" : "down";
  return el(
    "article",
    { class: `completion tone-${tone}`, "data-completion": at, "aria-label": `Completion ${at + 1}` },
    el("h4", {}, `Completion ${at + 1}`, mark ? el("span", { class: "word" }, mark) : null),
    el(
      "dl",
      { class: "numbers" },
      numbers.map(([name, value]) => el("div", {}, el("dt", {}, foreign(name)), el("dd", {}, foreign(value)))),
    ),
    completionBody(completion),
  );
}

function completionBody(completion) {
  const chosen = reading.measure ?? (completion.episode ? "none" : "logp");
  const measure = measuresOf(completion).includes(chosen) ? chosen : "none";
  if (completion.tokens && (measure !== "none" || reading.marks)) return tokenView(completion, measure, reading.marks);
  if (completion.episode) return turnsView(completion.episode);
  return longText(completion.text);
}

function readingBar(group, redraw) {
  const names = Object.keys(MEASURES).filter((name) =>
    group.completions.some((completion) => measuresOf(completion).includes(name)),
  );
  const fallback =
    group.completions.some((completion) => completion.episode) || !names.includes("logp") ? "none" : "logp";
  const current = names.includes(reading.measure) ? reading.measure : fallback;
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
  const steps = groups.map((group) => group.step);
  const rewards = groups.map(groupReward);
  const numbers = rewards.filter(isNumber);
  const details = el(
    "details",
    { class: "through" },
    el("summary", {}, `This prompt through the steps (${groups.length} groups)`),
    curve(steps, rewards, {
      low: Math.min(0, ...numbers),
      high: Math.max(1, ...numbers),
      first: steps[0],
      last: steps[steps.length - 1],
      color: run.color,
      label: "mean reward by step",
      width: 480,
    }),
    el(
      "p",
      { class: "quiet" },
      `Mean reward of the group: ${short(rewards[0])} at step ${steps[0]}, ${short(rewards[rewards.length - 1])} at step ${steps[steps.length - 1]}. Below, the best completion of each group.`,
    ),
    el(
      "ol",
      { class: "history" },
      groups.slice(0, 200).map((group, at) => {
        const best = bestOf(group);
        return el(
          "li",
          {},
          button([`Step ${group.step}`], () => openGroup(run, group), {
            class: "link",
            "aria-current": group === current ? "true" : null,
          }),
          el("span", { class: "quiet" }, ` mean ${short(rewards[at])}, best ${short(best.reward)}: `),
          el("span", { class: "excerpt" }, foreign(excerpt(best.text, 200))),
        );
      }),
    ),
  );
  details.open = state.through === "1";
  details.addEventListener("toggle", () => setState({ through: details.open ? 1 : "" }));
  return details;
}

// The same prompt in the other runs, at the recorded step closest to this one.
function otherRuns(run, prompt, step) {
  if (!several()) return null;
  const columns = page.runs
    .map((other) => {
      const groups = other.groups.filter((group) => group.prompt === prompt);
      if (groups.length === 0) return null;
      return [
        other,
        groups.reduce((best, group) => (Math.abs(group.step - step) < Math.abs(best.step - step) ? group : best)),
      ];
    })
    .filter(Boolean);
  if (columns.length < 2) return null;
  return el(
    "section",
    { class: "other-runs" },
    el("h3", {}, `The same prompt in ${columns.length} runs`),
    el(
      "div",
      { class: "columns", tabindex: "0", role: "region", "aria-label": "The same prompt in other runs" },
      columns.map(([other, group]) =>
        el(
          "div",
          { class: "column" },
          el("h4", {}, swatch(other.color, other.dash), foreign(runLabel(other))),
          el(
            "p",
            {},
            button(`Step ${group.step}`, () => openGroup(other, group), {
              class: "link",
              "aria-current": other === run && group.step === step ? "true" : null,
            }),
            el("span", { class: "quiet" }, ` mean reward ${short(groupReward(group))}`),
          ),
          el(
            "ol",
            { class: "plain" },
            bestAndWorstFirst(group.completions)
              .slice(0, 4)
              .map((at) => {
                const completion = group.completions[at];
                return el(
                  "li",
                  {},
                  el("span", { class: "quiet" }, `reward ${short(completion.reward)} `),
                  longText(completion.text.slice(0, 3000)),
                );
              }),
          ),
        ),
      ),
    ),
  );
}
