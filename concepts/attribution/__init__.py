"""Attribution: the request, `attribute`, comparisons, results and their controls."""
