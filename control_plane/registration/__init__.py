"""How data planes register: streams, reports, and the index that is rebuilt from reports."""
