// Package e2b runs E2B's own clients, as they are published, against a real daemon with real machines. Which versions were
// tried, and what of them works, it writes into docs/e2b.md.
package e2b
