package lineage

import "strings"

// stepPrefix marks the tags of a build's steps. No user can give such a tag: it begins with a dot.
const stepPrefix = ".step-"

// stepDigits is how much of a step's key its tag has.
const stepDigits = 32

// StepTag is the tag of the snapshot that a finished step of a build is kept as. key is at least 32 hexadecimal digits, and
// determines the step with all before it.
func StepTag(key string) string { return stepPrefix + key[:stepDigits] }

// IsStep tells the snapshots of steps from those that users have made.
func IsStep(tag string) bool {
	digits, ok := strings.CutPrefix(tag, stepPrefix)
	return ok && len(digits) == stepDigits && strings.Trim(digits, "0123456789abcdef") == ""
}

// CheckKnownTag says whether s can be the tag of a snapshot that is there: a user's, or a step's.
func CheckKnownTag(s string) error {
	if IsStep(s) {
		return nil
	}
	return CheckTag(s)
}

// OnlySteps says whether all of these tags are steps'. What stands on nothing but the cache can go with it.
func OnlySteps(tags []string) bool {
	for _, t := range tags {
		if !IsStep(t) {
			return false
		}
	}
	return true
}
