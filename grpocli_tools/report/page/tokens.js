// The tokens of a completion, coloured by one of the numbers that were recorded for each.

const difference = (a, b) => (isNumber(a) && isNumber(b) ? a - b : null);

// scale: the values at the ends of the colours. A sequential one colours the values far from 0, a diverging one both
// signs.
const MEASURES = {
  none: { label: "No color" },
  logp: {
    label: "Log-prob (sampler)",
    of: (one, at) => one.logp?.[at],
    scale: [-5, 0],
    ends: ["≤ −5: unlikely", "0: certain"],
  },
  ratio: {
    label: "Ratio of the last update",
    of: (one, at) => (one.ratio?.[at] > 0 ? Math.log(one.ratio[at]) : null),
    scale: [-0.3, 0.3],
    diverging: true,
    ends: ["≤ 0.74: less likely now", "1", "≥ 1.35: more likely now"],
  },
  mismatch: {
    label: "Mismatch: trainer − sampler",
    of: (one, at) => difference(one.trainer_logp?.[at], one.logp?.[at]),
    scale: [-0.2, 0.2],
    diverging: true,
    ends: ["≤ −0.2", "0", "≥ 0.2"],
  },
  entropy: {
    label: "Entropy (nats)",
    of: (one, at) => one.entropy?.[at],
    scale: [2, 0],
    ends: ["≥ 2: undecided", "0: certain"],
  },
  advantage: {
    label: "Advantage",
    of: (one, at) => (one.mask && !one.mask[at] ? null : one.advantage),
    scale: [-2, 2],
    diverging: true,
    ends: ["≤ −2: made less likely", "0", "≥ 2: made more likely"],
  },
};
const STRONGEST = 0.4; // the opacity of the background at an end of a scale: texts stay easy to read

function measuresOf(completion) {
  return Object.keys(MEASURES).filter(
    (name) => name === "none" || completion.tokens?.some((_, at) => isNumber(MEASURES[name].of(completion, at))),
  );
}

function tokenColor(measure, value) {
  if (!isNumber(value) || !measure.scale) return "";
  const share = Math.min(1, Math.abs(value) / Math.max(...measure.scale.map(Math.abs)));
  const strength = (measure.diverging ? share : share ** 1.5) * STRONGEST;
  if (strength < 0.005) return "";
  return `rgb(var(--${measure.diverging && value < 0 ? "cool" : "warm"}) / ${strength.toFixed(3)})`;
}

function tokenLegend(name) {
  const measure = MEASURES[name];
  if (!measure.scale) return [];
  const ramp = el(
    "span",
    { class: "ramp", "aria-hidden": "true" },
    Array.from({ length: 9 }, (_, at) => {
      const value = measure.scale[0] + ((measure.scale[1] - measure.scale[0]) * at) / 8;
      return el("span", { style: { "background-color": tokenColor(measure, value) || "transparent" } });
    }),
  );
  return [
    el(
      "span",
      { class: "legend" },
      el("span", {}, measure.ends[0]),
      ramp,
      el("span", {}, measure.ends[measure.ends.length - 1]),
    ),
  ];
}

const markLegend = () => [
  el("span", { class: "token clipped" }, "clipped"),
  " gradient cut off by the objective  ",
  el("span", { class: "token masked" }, "masked"),
  " not in the loss",
];

// Spaces and line ends as marks, if they are asked for.
function tokenNodes(text, marks) {
  if (!marks) return text.trim() === "" && text !== "" && !text.includes("\n") ? [text] : shown(text);
  return shown(text.replaceAll(" ", "·").replaceAll("\t", "→\t").replaceAll("\n", "⏎\n"));
}

function tokenNumbers(completion, at) {
  const ratio = completion.ratio?.[at];
  const parts = [
    ["log-prob", completion.logp?.[at]],
    ["trainer's log-prob", completion.trainer_logp?.[at]],
    ["mismatch", MEASURES.mismatch.of(completion, at)],
    ["entropy", completion.entropy?.[at]],
    ["ratio", ratio],
  ]
    .filter(([, value]) => isNumber(value))
    .map(([name, value]) => `${name} ${short(value, 5)}`);
  if (isNumber(completion.logp?.[at])) parts.splice(1, 0, `probability ${short(Math.exp(completion.logp[at]), 3)}`);
  if (completion.clipped?.[at]) parts.push("clipped");
  if (completion.mask && !completion.mask[at]) parts.push("masked");
  return [
    el("strong", {}, `token ${at + 1}`),
    " ",
    el("code", {}, foreign(JSON.stringify(excerpt(completion.tokens[at], 60)))),
    " ",
    parts.join(" · "),
  ];
}

const FIRST_TOKENS = 1000;

// The tokens, and below them the numbers of the token under the mouse or, with the arrow keys, of the current one.
function tokenView(completion, name, marks) {
  const { tokens } = completion;
  const values = el("p", { class: "token-values", "aria-live": "polite" }, "");
  const area = el("div", {
    class: marks ? "tokens marks" : "tokens",
    tabindex: "0",
    role: "group",
    "aria-label": "Tokens; the arrow keys go through them",
    dir: "auto",
  });
  let current = -1;
  function choose(at) {
    if (at < 0 || at >= area.childElementCount || at === current) return;
    area.children[current]?.classList.remove("current");
    current = at;
    area.children[at].classList.add("current");
    fill(values, ...tokenNumbers(completion, at));
  }
  area.addEventListener("mouseover", (event) => {
    const token = event.target.closest("[data-token]");
    if (token) choose(Number(token.dataset.token));
  });
  area.addEventListener("keydown", (event) => {
    const last = area.childElementCount - 1;
    const target = {
      ArrowRight: current + 1,
      ArrowLeft: current - 1,
      ArrowDown: current + 10,
      ArrowUp: current - 10,
      Home: 0,
      End: last,
    }[event.key];
    if (target === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(last, target)));
    area.children[current].scrollIntoView({ block: "nearest" });
  });
  const block = el("div", { class: "token-block" }, area, values);
  addTokens(block, area, completion, name, marks, FIRST_TOKENS);
  return block;
}

function addTokens(block, area, completion, name, marks, end) {
  for (let at = area.childElementCount; at < Math.min(end, completion.tokens.length); at++)
    area.append(tokenElement(completion, at, MEASURES[name], marks));
  find("[data-more]", block)?.remove();
  if (completion.tokens.length <= end) return;
  block.append(
    button(
      `Show more (${count(end)} of ${count(completion.tokens.length)} tokens)`,
      () => addTokens(block, area, completion, name, marks, end * 5),
      { class: "small", "data-more": true },
    ),
  );
}

function tokenElement(completion, at, measure, marks) {
  const masked = completion.mask && !completion.mask[at];
  const turn = at > 0 && completion.episode && completion.mask && completion.mask[at] !== completion.mask[at - 1];
  const kind = ["token", masked ? "masked" : "", completion.clipped?.[at] ? "clipped" : "", turn ? "turn" : ""]
    .filter(Boolean)
    .join(" ");
  const element = el("span", { class: kind, "data-token": at });
  const text = completion.tokens[at];
  if (text.length > 400) element.append(...shown(text.slice(0, 400)), "…");
  else element.append(...tokenNodes(text, marks));
  const color = measure.of ? tokenColor(measure, measure.of(completion, at)) : "";
  if (color) element.style.backgroundColor = color;
  return element;
}
