// What the theme lacks for keyboards and screen readers: keys scroll wide code, tables and equations, and of navigations
// inside another one and of the buttons of a block of code, none is a landmark of its own.
const complete = () => {
  const wide = ":is(pre > code, .md-typeset__scrollwrap, div.math):not([tabindex])";
  document.querySelectorAll(wide).forEach((element) => (element.tabIndex = 0));
  document.querySelectorAll("nav nav:not([role]), .md-code__nav:not([role])").forEach((nav) => {
    nav.role = "none";
    ["aria-label", "aria-labelledby", "aria-expanded"].forEach((name) => nav.removeAttribute(name));
  });
};
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
complete();

// A search for "how do I change it" would match every word that begins with "how", "do" and "I": it asks for the others.
const dropped = "a an and are as at be can do does for from how i in is it me my of on or the to what when where which why";
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...others) {
  if (typeof message.data === "string") {
    const words = message.data.replace("?", "").split(/\s+/);
    const kept = words.filter((word) => !dropped.split(" ").includes(word.toLowerCase()));
    message = { ...message, data: kept.join(" ") || message.data };
  }
  return post.call(this, message, ...others);
};
