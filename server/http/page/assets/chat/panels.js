// The list of conversations on a narrow screen, and files that are dropped on the chat.

/** Close the list where it covers the messages; returns whether it did. */
export function closeList() {
  const list = document.getElementById("conversations");
  // The button is there on a narrow screen only.
  const covers = "open" in list.dataset && document.getElementById("conversations-close").checkVisibility();
  delete list.dataset.open;
  if (covers) document.getElementById("conversations-toggle").focus();
  return covers;
}

/** Prepare the view; `search` shows the list. */
export function setUpPanels(view, composer, search) {
  document.getElementById("conversations-toggle").addEventListener("click", () => {
    if (!closeList()) search();
  });
  document.getElementById("conversations-close").addEventListener("click", closeList);
  const files = (event) => event.dataTransfer?.types.includes("Files");
  view.addEventListener("dragover", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    view.classList.add("dropping");
  });
  view.addEventListener("dragleave", (event) => {
    if (!view.contains(event.relatedTarget)) view.classList.remove("dropping");
  });
  view.addEventListener("drop", (event) => {
    view.classList.remove("dropping");
    if (!files(event)) return;
    event.preventDefault();
    composer.attach([...event.dataTransfer.files]);
  });
}
