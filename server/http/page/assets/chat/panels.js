// The list of conversations on a narrow screen, and files that are dropped on the chat.

/** Prepare the view; `search` shows the list. */
export function setUpPanels(view, composer, search) {
  document.getElementById("conversations-toggle").addEventListener("click", () => {
    const list = document.getElementById("conversations");
    if ("open" in list.dataset) delete list.dataset.open;
    else search();
  });
  document.getElementById("conversations-close").addEventListener("click", () => {
    delete document.getElementById("conversations").dataset.open;
    document.getElementById("conversations-toggle").focus();
  });
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
