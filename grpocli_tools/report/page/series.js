// The runs of the page and their numbers: groups of seeds, smoothing, means and bands.

const page = {
  data: null,
  runs: [],
  groups: [], // {name, label, color, dash, runs}: runs that differ only in the seed
  hidden: new Set(), // ids of runs that are switched off
  step: null, // of the shared step cursor
  follows: true, // the cursor stays at the newest step until the reader moves it
  printing: false,
  zoom: null, // [first, last] step that the charts show, or null for all
};

const COLORS = 7;
const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3]];

function setRuns(runs) {
  page.runs = runs;
  const groups = new Map();
  for (const run of runs) {
    run.index = new Map(run.steps.map((step, number) => [step, number]));
    const name = run.group || run.id;
    if (!groups.has(name)) groups.set(name, { name, runs: [] });
    groups.get(name).runs.push(run);
  }
  page.groups = [...groups.values()];
  page.groups.forEach((group, number) => {
    group.color = number % COLORS;
    group.dash = DASHES[Math.floor(number / COLORS) % DASHES.length];
    group.label = group.runs.length > 1 ? group.name : group.runs[0].label || group.runs[0].name;
    for (const run of group.runs) Object.assign(run, { color: group.color, dash: group.dash });
  });
}

const several = () => page.runs.length > 1;
const runById = (id) => page.runs.find((run) => run.id === id);
const runLabel = (run) => run.label || run.name;
// A run among those of its group: its label without the group's name.
function seedLabel(run) {
  const label = runLabel(run);
  return label.startsWith(run.group) && label.length > run.group.length
    ? label.slice(run.group.length).replace(/^[\s,]+/, "")
    : label;
}
const visibleRuns = () => page.runs.filter((run) => !page.hidden.has(run.id));

function valueAt(run, metric, step) {
  const number = run.index.get(step);
  const value = number === undefined ? null : (run.metrics[metric] ?? [])[number];
  return isNumber(value) ? value : null;
}

const hasMetric = (run, metric) => (run.metrics[metric] ?? []).some(isNumber);

// All steps of the runs, in order.
function unionOfSteps(runs) {
  if (runs.length === 1) return runs[0].steps;
  return [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
}

// The values of a metric at `steps`, null where a run has none.
function seriesOf(run, metric, steps) {
  const values = run.metrics[metric] ?? [];
  if (steps === run.steps) return steps.map((_, number) => (isNumber(values[number]) ? values[number] : null));
  return steps.map((step) => valueAt(run, metric, step));
}

const FEWEST_TO_SMOOTH = 20;

// An exponential moving average over the values that are there, corrected for its start (as in Adam). A few points,
// such as evaluations, stay as they are.
function smooth(values, weight) {
  if (weight === 0 || values.filter((value) => value !== null).length < FEWEST_TO_SMOOTH) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Mean of several series with a band: their minimum and maximum, or one standard deviation (n - 1) to each side.
function meanAndBand(series, kind) {
  const mean = [],
    low = [],
    high = [];
  for (let number = 0; number < series[0].length; number++) {
    const values = series.map((one) => one[number]).filter((value) => value !== null);
    const average = values.length === 0 ? null : values.reduce((a, b) => a + b, 0) / values.length;
    mean.push(average);
    if (values.length < 2) {
      low.push(average);
      high.push(average);
    } else if (kind === "sd") {
      const sd = Math.sqrt(values.reduce((sum, value) => sum + (value - average) ** 2, 0) / (values.length - 1));
      low.push(average - sd);
      high.push(average + sd);
    } else {
      low.push(Math.min(...values));
      high.push(Math.max(...values));
    }
  }
  return { mean, low, high };
}

// The step of the page closest to `step`.
function nearest(steps, step) {
  if (steps.length === 0) return null;
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? steps[low - 1] : steps[low];
}

// At most `limit` numbers of 0 ... length - 1, the first and the last included.
function evenlySpaced(length, limit) {
  if (length <= limit) return Array.from({ length }, (_, number) => number);
  return Array.from({ length: limit }, (_, number) => Math.round((number * (length - 1)) / (limit - 1)));
}
