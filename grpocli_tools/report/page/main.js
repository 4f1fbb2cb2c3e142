// The page: its tabs, and what happens when the address, the data or the colours change.

const TABS = {
  results: { label: "Results", build: buildResults, several: true },
  curves: { label: "Curves", build: buildCurves },
  wall: { label: "Wall", build: buildWall, several: true },
  rollouts: { label: "Rollouts", build: buildRollouts },
};

const tabNames = () => Object.keys(TABS).filter((name) => several() || !TABS[name].several);
const currentTab = () => (tabNames().includes(state.tab) ? state.tab : tabNames()[0]);

function buildTabs() {
  const tabs = tabNames().map((name) =>
    button(TABS[name].label, () => setState({ tab: name }, true), {
      role: "tab",
      id: `tab-${name}`,
      "aria-controls": `panel-${name}`,
      "data-tab": name,
    }),
  );
  const list = el("div", { role: "tablist", "aria-label": "Parts of the page" }, tabs);
  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    const target = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    const tab = tabs[(target + tabs.length) % tabs.length];
    tab.focus();
    tab.click();
  });
  fill(find("#tabs"), list);
  fill(
    find("#main"),
    ...tabNames().map((name) =>
      el("div", {
        class: "panel",
        id: `panel-${name}`,
        role: "tabpanel",
        "aria-labelledby": `tab-${name}`,
        hidden: true,
      }),
    ),
  );
}

function showTab() {
  const current = currentTab();
  const main = find("#main");
  if (main.getBoundingClientRect().top < 0) main.scrollIntoView();
  for (const name of tabNames()) {
    const tab = find(`#tab-${name}`);
    tab.setAttribute("aria-selected", String(name === current));
    tab.tabIndex = name === current ? 0 : -1;
    find(`#panel-${name}`).hidden = name !== current;
  }
  if (find(`#panel-${current}`).childElementCount === 0) buildPanel(current);
}

// Builds a panel that is shown, or empties it so that it is built when it is.
function buildPanel(name) {
  const panel = find(`#panel-${name}`);
  if (!panel) return;
  if (name === currentTab()) TABS[name].build(panel);
  else fill(panel);
}

function showData(data) {
  page.data = data;
  page.prompts ??= [];
  setRuns(data.runs);
  if (rollouts.entries) for (const run of page.runs) run.groups ??= [];
  page.hidden = new Set((state.hidden ?? "").split(",").filter((id) => runById(id)));
  const zoom = /^(-?\d+)-(\d+)$/.exec(state.zoom ?? "");
  page.zoom = zoom ? [Number(zoom[1]), Number(zoom[2])] : page.zoom;
  followNewest();
  if (state.step !== undefined && page.steps.length) {
    page.step = nearest(page.steps, Number(state.step));
    page.follows = false;
  }
  buildHeader();
  buildTabs();
  showTab();
  if (data.live !== null && currentTab() === "rollouts") loadWantedSteps();
}

function stateChanged(changed) {
  if (changed.has("tab")) showTab();
  const step = Number(state.step);
  if (changed.has("step") && state.step !== undefined && step !== page.step) moveTo(nearest(page.steps, step));
  if (changed.has("wall")) drawWall();
  if (currentTab() !== "rollouts" || !rollouts.panel) return;
  if (page.data.live !== null && ["from", "to", "tab", "group"].some((key) => changed.has(key))) scheduleLoad();
  const isFiltered = [...changed].some(isFilter);
  if (isFiltered) {
    showFilters();
    applyFilters();
  }
  if (changed.has("group") || changed.has("at") || (isFiltered && !state.group)) drawGroup();
}

const PRINTED_WIDTH = 320; // of a chart, in a grid of two columns

// On paper all parts stand below each other: every chart, and the open group of rollouts.
function printing(on) {
  if (page.printing === on) return;
  page.printing = on;
  applyTheme(on ? "light" : null);
  for (const name of tabNames()) {
    const panel = find(`#panel-${name}`);
    if (on && panel.childElementCount === 0) TABS[name].build(panel);
    panel.hidden = on ? false : name !== currentTab();
  }
  if (on) drawAll();
  resizeCharts(on ? PRINTED_WIDTH : null);
}

// width: null for the width of each chart's area.
function resizeCharts(width = null) {
  for (const { plot, area } of curves.charts) {
    const wanted = width ?? area.clientWidth;
    if (plot && wanted > 0 && plot.width !== wanted) plot.setSize({ width: wanted, height: CHART_HEIGHT });
  }
}

function start() {
  startState();
  applyTheme();
  showData(JSON.parse(find("#data").textContent));
  onState(stateChanged);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme());
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
  matchMedia("print").addEventListener("change", (event) => printing(event.matches));
  find("#skip").addEventListener("click", (event) => {
    event.preventDefault();
    find("#main").focus();
  });
  new ResizeObserver(() => {
    if (!page.printing) resizeCharts();
  }).observe(find("#main"));
  if (page.data.live !== null) startLive();
  page.ready = performance.now();
  document.documentElement.dataset.ready = page.ready.toFixed(0);
}

start();
