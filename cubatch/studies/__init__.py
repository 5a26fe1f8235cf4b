"""`cubatch study`: questions that people ask about batch sizes, each measured and answered on a page."""
