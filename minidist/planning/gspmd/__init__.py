"""GSPMD (Xu et al. 2021): placements of a few values spread through a graph; the result runs."""
