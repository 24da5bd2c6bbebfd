"""`GET /docs`: the API as a page to read and try, from files of the package, so that it needs no other host."""
