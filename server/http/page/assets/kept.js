// Small values that this browser keeps: in local storage, where it is not blocked.

/** The value that was kept; `otherwise` if there is none, or the storage is blocked or damaged. */
export function recall(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Keep a value; returns false if the storage is blocked or full: it lasts until the page is left. */
export function keep(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
