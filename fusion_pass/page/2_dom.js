// Elements; text only ever enters the page as text.

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  assign(made, properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(tag, properties = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  assign(made, properties);
  made.append(...children);
  return made;
}

function assign(made, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
}

/** Makes an element that is no button work as one, by mouse and by key. */
function clickable(made, action) {
  made.setAttribute("tabindex", "0");
  made.addEventListener("click", action);
  made.addEventListener("keydown", (event) => {
    if (event.target !== made || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    action(event);
  });
  return made;
}

/** A `details` whose content is made when it is first opened. */
function disclosure(title, fill, properties = {}) {
  const made = element("details", properties, element("summary", {}, title));
  made.addEventListener("toggle", () => {
    if (made.open && made.childElementCount === 1) made.append(fill());
  });
  return made;
}

/** A list of names and values, without those that are empty; `meanings` explains some names. */
function definitions(pairs, meanings = {}) {
  const list = element("dl");
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "") continue;
    const meaning = meanings[words(name).toLowerCase()];
    const explained = meaning && element("span", { class: "meaning" }, meaning);
    list.append(element("dt", { title: meaning }, name), element("dd", {}, spell(value), explained));
  }
  return list;
}

function spell(value) {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value)) return value.map(spell).join(", ");
  if (typeof value !== "object") return String(value);
  return Object.entries(value).map(([name, part]) => `${name} ${spell(part)}`).join(", ");
}

const words = (name) => name.replaceAll("_", " ");

/** A path's last parts, which is where it differs from the others; the whole as its title. */
function place(source) {
  if (!source) return null;
  const short = source.split("/").slice(-2).join("/");
  return element("span", { class: "place", title: source }, short);
}
