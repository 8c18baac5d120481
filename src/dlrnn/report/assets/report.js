// Sorting, dialogs, values of plots. No request leaves the site.
"use strict";

document.documentElement.classList.add("js");

// ------------------------------------------------------------------ tables that sort

const keyOf = (row, place) => row.cells[place].dataset.sort ?? row.cells[place].textContent;

function sortBy(head) {
  const body = head.closest("table").tBodies[0];
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  const place = head.cellIndex;
  const compare = (a, b) => {
    const [x, y] = [keyOf(a, place), keyOf(b, place)];
    if (x === "" || y === "") return (x === "") - (y === ""); // missing values come last
    const numbers = !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
    return sign * (numbers ? Number(x) - Number(y) : x.localeCompare(y));
  };
  body.append(...[...body.rows].sort(compare));
}

for (const button of document.querySelectorAll(".sortable th button")) {
  button.addEventListener("click", () => sortBy(button.closest("th")));
}

// ------------------------------------------------------------------ cells that open

function openCell(hash) {
  const dialog = hash.length > 1 && document.getElementById(decodeURIComponent(hash.slice(1)));
  if (!(dialog instanceof HTMLDialogElement) || dialog.open) return false;
  dialog.showModal();
  dialog.scrollTop = 0;
  return true;
}

document.addEventListener("click", (event) => {
  const link = event.target.closest('a[aria-haspopup="dialog"]');
  if (link && openCell(link.hash)) {
    event.preventDefault();
    history.replaceState(null, "", link.hash);
  }
  if (event.target instanceof HTMLDialogElement) event.target.close(); // a click outside the dialog
});
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname));
}
window.addEventListener("hashchange", () => openCell(location.hash));
openCell(location.hash);

// ------------------------------------------------------------------ values of plots

const MOVES = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };

// Create the points of a line with many points when they are needed.
function unfold(group) {
  const { a, b, v } = group.dataset;
  const places = group.firstElementChild.getAttribute("d").match(/[\d.-]+/g);
  v.split(";").forEach((pair, k) => {
    const [x, y] = pair.split(" ");
    const point = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    const known = { class: "point", cx: places[2 * k], cy: places[2 * k + 1], r: 3, "data-t": `${a} ${x}, ${b} ${y}` };
    for (const [name, value] of Object.entries(known)) point.setAttribute(name, value);
    group.append(point);
  });
  delete group.dataset.v;
}

function readable(plot) {
  const tip = plot.querySelector(".tip");
  const drawing = plot.querySelector("svg");
  let shown = null;

  const points = () => {
    drawing.querySelectorAll("[data-v]").forEach(unfold);
    return [...drawing.querySelectorAll("[data-t]")];
  };
  const at = (point) => [point.dataset.x ?? point.getAttribute("cx"), point.dataset.y ?? point.getAttribute("cy")];
  const hide = () => {
    shown?.classList.remove("on");
    shown = null;
    tip.hidden = true;
  };
  const show = (point) => {
    if (!point || point === shown) return;
    hide();
    shown = point;
    point.classList.add("on");
    const view = drawing.viewBox.baseVal;
    const [left, top] = at(point);
    const across = (left / view.width) * plot.clientWidth;
    const half = Math.min(120, plot.clientWidth / 2);
    tip.textContent = `${point.parentElement.dataset.n}: ${point.dataset.t}`;
    tip.style.left = `${Math.min(Math.max(across, half), plot.clientWidth - half)}px`;
    tip.style.top = `${(top / view.height) * drawing.clientHeight}px`;
    tip.hidden = false;
  };

  plot.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const view = drawing.viewBox.baseVal;
    const x = ((event.clientX - box.left) / box.width) * view.width;
    const y = ((event.clientY - box.top) / box.height) * view.height;
    let best = null;
    let least = 40 ** 2;
    for (const point of points()) {
      const [left, top] = at(point);
      const far = (left - x) ** 2 + (top - y) ** 2;
      if (far < least) [best, least] = [point, far];
    }
    if (best) show(best);
    else hide();
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && shown) {
      event.preventDefault(); // the dialog around it stays open
      hide();
    }
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    const all = points();
    const next = all.indexOf(shown) + MOVES[event.key];
    show(all[Math.max(0, Math.min(all.length - 1, next))]);
  });
}

for (const plot of document.querySelectorAll(".plot")) readable(plot);

// ------------------------------------------------------------------ tables that are too wide

const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const more = target.scrollWidth > target.clientWidth + 1;
    target.closest(".box")?.classList.toggle("more", more); // report.css shows a hint
  }
});
for (const wide of document.querySelectorAll(".wide")) widths.observe(wide);
