"""`tessera run`: a service and a conversation with it in one command."""
