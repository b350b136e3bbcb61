"""The model split over ranks by layers or branches; every rank holds a part of it."""
