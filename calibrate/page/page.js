// Names the part of a picture that is under the pointer, tapped, or reached by the keyboard.
(() => {
  "use strict";
  const tip = document.getElementById("tip");
  let current = null;

  function hide() {
    if (current) current.classList.remove("on");
    current = null;
    tip.textContent = "";
  }

  function show(mark) {
    if (mark === current) return;
    hide();
    current = mark;
    mark.classList.add("on");
    tip.textContent = mark.dataset.said;
    const svg = mark.ownerSVGElement;
    const at = new DOMPoint(+mark.dataset.x, +mark.dataset.y).matrixTransform(svg.getScreenCTM());
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(at.x - box.width / 2, 8), innerWidth - box.width - 8);
    const above = at.y - box.height - 14;
    tip.style.transform = `translate(${Math.max(left, 8)}px, ${above > 4 ? above : at.y + 16}px)`;
  }

  for (const picture of document.querySelectorAll(".picture")) {
    const svg = picture.querySelector("svg");
    const marks = [...svg.querySelectorAll(".m")];
    if (!marks.length) continue;
    for (const mark of marks) {
      const title = mark.querySelector("title");
      mark.dataset.said = title.textContent;
      title.remove(); // the browser would show it a second time
    }
    const places = marks.map((mark) => [+mark.dataset.x, +mark.dataset.y]);
    const reach = +picture.dataset.reach, stride = +picture.dataset.stride;

    const point = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let best = -1, least = reach * reach;
      places.forEach(([x, y], index) => {
        const away = (x - at.x) ** 2 + (y - at.y) ** 2;
        if (away < least) [best, least] = [index, away];
      });
      if (best < 0) hide();
      else show(marks[best]);
    };
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    picture.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") hide();
    });
    picture.addEventListener("focus", () => {
      if (picture.matches(":focus-visible") && !marks.includes(current)) show(marks[0]);
    });
    picture.addEventListener("blur", hide);
    picture.addEventListener("keydown", (event) => {
      const here = marks.indexOf(current), last = marks.length - 1;
      const next = {
        ArrowRight: here + 1, ArrowLeft: here - 1, ArrowDown: here + stride, ArrowUp: here - stride,
        PageDown: here + 10 * stride, PageUp: here - 10 * stride, Home: 0, End: last,
      }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      show(marks[Math.min(Math.max(next, 0), last)]);
    });
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  document.addEventListener("pointerdown", (event) => event.target.closest(".picture") || hide());
  // A tap focuses a picture too: only what the keyboard reached keeps its tip.
  addEventListener("scroll", () => document.querySelector(".picture:focus-visible") || hide(), { passive: true });
})();
