// Applies the stored colour scheme before the page is painted. Not a module, since modules run after the first paint.
"use strict";
try {
  const scheme = localStorage.getItem("tessera.scheme");
  if (scheme === "light" || scheme === "dark") document.documentElement.dataset.scheme = scheme;
} catch {
  // Storage is blocked: the system's scheme applies.
}
