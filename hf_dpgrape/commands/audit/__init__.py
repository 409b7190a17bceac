"""`hf-dpgrape audit`: a lower bound on epsilon from one run with canaries, beside the claim."""
