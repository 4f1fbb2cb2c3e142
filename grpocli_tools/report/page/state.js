// The state of the page that a link can carry, in the address behind `#`: tab, step, filters, open group.

const state = {};
const stateListeners = [];
let pendingWrite = null;

function readAddress() {
  const next = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const changed = new Set([...Object.keys(state), ...Object.keys(next)].filter((key) => state[key] !== next[key]));
  for (const key of Object.keys(state)) delete state[key];
  Object.assign(state, next);
  return changed;
}

function address() {
  const entries = Object.entries(state).filter(([, value]) => value !== "");
  return "#" + new URLSearchParams(entries).toString();
}

// push: an entry of the browser's history, for what Back should undo. Other changes are written together, a little
// later.
function setState(changes, push = false) {
  if (push) writeAddress();
  const changed = new Set();
  for (const [key, given] of Object.entries(changes)) {
    const value = given === null || given === undefined ? "" : String(given);
    if ((state[key] ?? "") !== value) changed.add(key);
    if (value === "") delete state[key];
    else state[key] = value;
  }
  if (changed.size === 0) return;
  if (push) {
    history.pushState(null, "", address());
  } else if (pendingWrite === null) {
    pendingWrite = setTimeout(writeAddress, 300);
  }
  tell(changed);
}

function writeAddress() {
  if (pendingWrite === null) return;
  clearTimeout(pendingWrite);
  pendingWrite = null;
  history.replaceState(null, "", address());
}

function tell(changed) {
  for (const listener of stateListeners) listener(changed);
}

// `listener` is called with the set of changed keys.
function onState(listener) {
  stateListeners.push(listener);
}

function startState() {
  readAddress();
  addEventListener("popstate", () => {
    if (pendingWrite !== null) clearTimeout(pendingWrite);
    pendingWrite = null;
    const changed = readAddress();
    if (changed.size > 0) tell(changed);
  });
}
