// What a screen reader or weak eyes would stumble over: a sentence each.
() => {
  const wrong = [];
  const visible = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const say = (element, text) => wrong.push(`${text}: ${element.outerHTML.slice(0, 120)}`);
  const named = (element) =>
    element.getAttribute("aria-label")?.trim() ||
    (element.getAttribute("aria-labelledby") || "").split(" ").map((id) => document.getElementById(id)?.textContent || "").join("").trim() ||
    element.getAttribute("alt")?.trim();
  const hiddenFromAll = (element) => element.closest('[aria-hidden="true"]');

  for (const drawing of document.querySelectorAll("svg, img")) {
    if (!hiddenFromAll(drawing) && !named(drawing)) say(drawing, "a picture without a name");
    if (drawing.tagName === "svg" && !hiddenFromAll(drawing) && drawing.getAttribute("role") !== "img") say(drawing, "a drawing that is no image");
  }
  for (const control of document.querySelectorAll("input, select, button, a, [tabindex='0'], dialog")) {
    const label = named(control) || [...(control.labels || [])].map((each) => each.textContent).join("").trim();
    const text = control.matches("input, select, dialog, [tabindex='0']") ? "" : control.textContent.trim();
    if (!label && !text) say(control, "a control without a label");
  }
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    if (!visible(heading)) continue;
    const here = Number(heading.tagName[1]);
    if (here > level + 1) say(heading, `a heading of level ${here} after one of level ${level}`);
    level = here;
  }
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(`the id ${id} twice`);
  for (const table of document.querySelectorAll("table")) {
    if (!table.querySelector("th")) say(table, "a table without heads");
    for (const head of table.querySelectorAll("th")) if (!head.scope) say(head, "a head without a scope");
  }

  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return { r, g, b, a };
  };
  const over = (top, below) => ({
    r: top.r * top.a + below.r * (1 - top.a),
    g: top.g * top.a + below.g * (1 - top.a),
    b: top.b * top.a + below.b * (1 - top.a),
    a: 1,
  });
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.a > 0) layers.push(colour);
      if (colour.a === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), { r: 255, g: 255, b: 255, a: 1 });
  };
  const light = ({ r, g, b }) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const contrast = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  let texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || seen.has(element) || !visible(element)) continue;
    if (element.closest("title, desc, script, noscript, option, .hidden, .skip")) continue;
    seen.add(element);
    texts += 1;
    const style = getComputedStyle(element);
    const ink = parse(element instanceof SVGElement ? style.fill : style.color);
    const ground = behind(element);
    const size = parseFloat(style.fontSize);
    const enough = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const found = contrast(over(ink, ground), ground);
    if (found < enough) say(element, `contrast ${found.toFixed(2)}`);
  }
  for (const line of document.querySelectorAll(".plot .line > path, .plot .bars rect, .plot .dots .point")) {
    if (!visible(line)) continue;
    const found = contrast(parse(getComputedStyle(line).color), behind(line));
    if (found < 3) say(line, `contrast of a line ${found.toFixed(2)}`);
  }
  return { wrong, texts };
}
