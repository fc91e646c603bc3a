"""The hybrid cache: one arena, two pools, one prefix tree, four verbs (match, reserve, commit, release)."""
