"""One module for each group of routes; each makes an `APIRouter` from the app's context."""
