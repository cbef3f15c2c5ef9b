"""From the log back to behaviour: past steps run again, compared and explained."""
