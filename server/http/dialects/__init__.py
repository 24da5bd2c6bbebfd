"""Wire formats, one package each. `server.http.app` registers them; no other module of the HTTP layer imports them."""
