package e2bapi

// builds are builds of templates in progress.
type builds struct{}
