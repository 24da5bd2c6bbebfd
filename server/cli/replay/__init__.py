"""`tessera replay`: computes the replies of receipts again, and compares them."""
