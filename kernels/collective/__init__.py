"""Communication between the processes that compute one model together, each with a part of its weights."""
