// The page of a live run: newer data from the server of `grpocli watch`.

const live = { tag: "", frame: null, wait: 2000, timer: null };

async function ask(path) {
  const response = await fetch(page.data.live + path, { cache: "no-store" });
  if (response.status === 204) return null;
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

function say(text) {
  const place = find("#connection");
  if (place && place.textContent !== text) place.textContent = text;
}

function startLive() {
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) poll();
  });
  poll();
}

async function poll() {
  clearTimeout(live.timer);
  if (document.hidden) return;
  try {
    const answer = await ask(`data?known=${live.tag}`);
    live.wait = 2000;
    say("");
    if (answer) take(answer);
  } catch {
    live.wait = Math.min(30000, live.wait * 2);
    say("grpocli watch does not answer. If it has ended, start it again and open its new address.");
  }
  live.timer = setTimeout(poll, live.wait);
}

// What only a reload of the page changes.
const frameOf = ({ charts, notes, differences, runs }) =>
  JSON.stringify([charts, notes, differences, runs.map((run) => FRAME.map((key) => run[key]))]);

const FRAME = ["id", "path", "name", "label", "group", "state", "starts"];

function take(answer) {
  const frame = frameOf(answer);
  const grew = live.frame === frame;
  live.tag = answer.tag;
  live.frame = frame;
  if (grew) return takeUpdate(answer);
  rollouts.entries = null;
  rollouts.loaded.clear();
  showData({ ...answer, live: answer.live ?? page.data.live });
}

// Known runs with new steps; their loaded rollouts stay.
function takeUpdate(answer) {
  const before = curves.charts.length;
  for (const run of answer.runs) {
    const known = runById(run.id);
    Object.assign(known, run, { rollouts: { ...known.rollouts, steps: run.rollouts.steps } });
  }
  page.data.results = answer.results;
  setRuns(page.runs);
  followNewest();
  buildHeader();
  if (before !== knownCharts() || curves.folded !== foldedCharts()) buildPanel("curves");
  curves.charts.forEach((chart) => chart.extend());
  moveTo(page.step);
  if (several()) for (const name of ["results", "wall"]) buildPanel(name);
}

const knownCharts = () =>
  page.data.charts.filter((chart) => chart.lines.some((line) => page.runs.some((run) => hasMetric(run, line.metric))))
    .length;

function followNewest() {
  page.steps = unionOfSteps(page.runs);
  if (page.follows || page.step === null) page.step = page.steps[page.steps.length - 1] ?? null;
}

const MOST_STEPS = 20; // of a range whose rollouts are loaded

const recordedSteps = () => [...new Set(page.runs.flatMap((run) => run.rollouts.steps))].sort((a, b) => a - b);

// The steps whose rollouts the reader wants to see, and those of them that are loaded: of a range with a first step the
// first ones, otherwise the last ones; without a range that of the step cursor.
function wantedSteps() {
  const [from, to] = [bound("from"), bound("to")];
  const recorded = recordedSteps();
  if (from === null && to === null) {
    const step = page.step === null ? null : nearest(recorded, page.step);
    return { within: recorded, steps: step === null ? [] : [step] };
  }
  const within = recorded.filter((step) => step >= (from ?? -Infinity) && step <= (to ?? Infinity));
  return { within, steps: from === null ? within.slice(-MOST_STEPS) : within.slice(0, MOST_STEPS) };
}

function loadedText({ within, steps }) {
  if (within.length === steps.length) return "";
  const loaded = steps.length === 1 ? `step ${steps[0]}` : `steps ${steps[0]} to ${steps[steps.length - 1]}`;
  return `Loaded: ${loaded}, of ${plural(within.length, "step")}; ` + "the filter of the steps loads others.";
}

let loadScheduled = null;

// Loads the wanted steps when the reader has stopped typing.
function scheduleLoad() {
  clearTimeout(loadScheduled);
  loadScheduled = setTimeout(loadWantedSteps, 250);
}

async function loadWantedSteps() {
  if (!rollouts.panel || currentTab() !== "rollouts") return;
  loadRollouts();
  const wanted = wantedSteps();
  const opened = Number((state.group ?? "").split("~")[1] || NaN);
  for (const step of new Set([...wanted.steps, opened].filter(Number.isFinite))) {
    if ((await loadStep(step)) && find("#list")) showNewRollouts();
  }
  const note = find("#loaded");
  if (note) note.textContent = loadedText(wanted);
}

// The rollouts of a step, asked for when the reader wants them.
async function loadStep(step) {
  const runs = page.runs.filter(
    (run) => run.rollouts.steps.includes(step) && !rollouts.loaded.has(`${run.id}~${step}`),
  );
  for (const run of runs) {
    rollouts.loaded.add(`${run.id}~${step}`);
    try {
      const answer = await ask(`rollouts?run=${encodeURIComponent(run.id)}&step=${step}`);
      if (!answer) continue;
      const first = page.prompts.length;
      const known = new Map(page.prompts.map((prompt, at) => [prompt.task + "\0" + prompt.text, at]));
      const numbers = answer.prompts.map(
        (prompt) => known.get(prompt.task + "\0" + prompt.text) ?? page.prompts.push(prompt) - 1,
      );
      addGroups(
        run,
        answer.groups.map((group) => ({ ...group, prompt: numbers[group.prompt] })),
      );
    } catch {
      rollouts.loaded.delete(`${run.id}~${step}`);
      say(`The rollouts of step ${step} cannot be read.`);
    }
  }
  return runs.length > 0;
}
