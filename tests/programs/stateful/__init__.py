"""Programs that keep state, fail once and go on: watched they have to end as they end unwatched."""
