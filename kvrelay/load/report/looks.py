"""The page's style and its few lines of script: tips where the pointer is, tables that sort. Nothing is fetched."""

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --raised: #f6f7f9; --ink: #1b2430; --soft: #5c6877; --rule: #dfe3e8;
  --queue: #9aa4b1; --prefill: #3973b5; --wait: #a9c4e4; --relay: #e08214; --handoff: #b5176f; --main: #23936b;
  --server: #6b5fb0; --failed: #c4161c; --note: #fff5da; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181e; --raised: #1d232b; --ink: #e5e9ee; --soft: #9ba7b5;
  --rule: #313945; --queue: #6d7885; --prefill: #6aa5e8; --wait: #3f5f86; --relay: #f0a04b; --handoff: #ee6db3;
  --main: #4cc495; --server: #a396ee; --failed: #ff6b6b; --note: #38311c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0; }
p { margin: 4px 0 10px; }
.soft, figcaption p { color: var(--soft); font-size: 13.5px; }
code { font: 13px/1.5 ui-monospace, monospace; background: var(--raised); padding: 2px 6px; border-radius: 4px;
  overflow-wrap: anywhere; }
.note { background: var(--note); border-left: 4px solid var(--relay); padding: 8px 12px; margin: 8px 0;
  overflow-wrap: anywhere; }
.note.bad { border-color: var(--failed); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 12px; margin: 20px 0; }
.tile { background: var(--raised); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 21px; line-height: 1.3; white-space: nowrap; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
section, figure { margin: 36px 0 0; }
.wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 620px; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .tick, svg .label { fill: var(--soft); }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg text.note { font-size: 11.5px; paint-order: stroke; stroke: var(--ground); stroke-width: 3px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.level { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 5 4; opacity: .7; }
.line { fill: none; stroke: var(--kind); stroke-width: 2; stroke-linejoin: round; }
.area { fill: var(--kind); opacity: .22; }
.bar, .dot { fill: var(--kind); }
.bar { shape-rendering: crispEdges; }
.strip, .ground { fill: transparent; }
.strip:hover { fill: var(--ink); opacity: .09; }
.row:hover .ground { fill: var(--ink); opacity: .12; }
.pale { opacity: .4; }
.queue { --kind: var(--queue); } .prefill { --kind: var(--prefill); } .wait { --kind: var(--wait); }
.relay { --kind: var(--relay); } .handoff { --kind: var(--handoff); } .main { --kind: var(--main); }
.server { --kind: var(--server); } .failed { --kind: var(--failed); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; padding: 0; margin: 6px 0 2px;
  font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; background: var(--kind); }
.empty { background: var(--raised); border: 1px dashed var(--rule); border-radius: 8px; padding: 28px 20px;
  text-align: center; color: var(--soft); }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 5px 10px; text-align: left; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { overflow-wrap: anywhere; }
.number { text-align: right; white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.sorts thead th { cursor: pointer; }
.sorts thead th[aria-sort=ascending]::after { content: " \\25B4"; }
.sorts thead th[aria-sort=descending]::after { content: " \\25BE"; }
.requests td { white-space: nowrap; }
.requests td:nth-child(2) { white-space: normal; min-width: 130px; }
.facts th { width: 190px; font-weight: 600; white-space: nowrap; }
summary { cursor: pointer; font-weight: 600; font-size: 18px; margin-bottom: 8px; }
#tip { position: fixed; z-index: 9; pointer-events: none; white-space: pre-line; max-width: 460px; padding: 7px 10px;
  border-radius: 6px; background: var(--ink); color: var(--ground); font-size: 12.5px; line-height: 1.4;
  overflow-wrap: anywhere; }
@media print { .strip, #tip { display: none; } figure, section { break-inside: avoid; } }
"""

SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("pointermove", event => {
  const mark = event.target.closest("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4)) + "px";
  tip.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18) + "px";
});
for (const svg of document.querySelectorAll("svg")) {  // its title is for ears; an eye has the caption and the tips
  const title = svg.querySelector("title");
  svg.addEventListener("pointerenter", () => title.remove());
  svg.addEventListener("pointerleave", () => { svg.prepend(title); tip.hidden = true; });
}
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const sort = column => {
    const down = heads[column].getAttribute("aria-sort") === "ascending";
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (a, b) => {
      const [left, right] = [value(a, column), value(b, column)];
      if (left === "" || right === "") return (left === "") - (right === "");
      const found = isNaN(left) || isNaN(right) ? left.localeCompare(right) : left - right;
      return down ? -found : found;
    };
    body.append(...[...body.rows].sort(order));
  };
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(column));
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(column); });
  });
}
document.documentElement.dataset.ready = "";
"""
