"""Wrong messages: made by reflection on the contracts, and the services that refuse them."""
