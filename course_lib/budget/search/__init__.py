"""Search for the recipes that fit a memory budget. One file decides one thing, and it calls only
files to its right and below:

    fit: what is asked, and the table of what is found
    families: which combinations of techniques are searched
    best_numbers, candidates: how much of each technique is tried
    lower_bounds, estimate_cache: bounds without an estimate, and the estimates themselves
    extrapolation, optimizer_updates: how an estimate is composed from steps with few blocks
"""
