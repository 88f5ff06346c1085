"""How a run is shown: for a terminal, as files, as a page. Computes no figure that summary.py could."""
