"""Linear and integer programs, solved by HiGHS or CBC; the only folder that imports a solver."""
