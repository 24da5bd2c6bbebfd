"""`tessera plan`, and the model that is planned without weights."""
