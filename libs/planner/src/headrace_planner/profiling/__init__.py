"""What one stage costs, fitted to measured points. Knows no workflow and no plan."""
