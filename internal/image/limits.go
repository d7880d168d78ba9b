package image

import (
	"strconv"
	"strings"
)

// Limits bound what each sandbox takes of its host, unless a fork asks for others; zero bounds nothing.
type Limits struct {
	MemoryBytes int64
	CPUs        float64
	IOBytes     int64 // a second
	IORequests  int64 // a second
	PIDs        int64
}

const (
	minLimitMemory = 64 << 20
	minLimitIO     = 1 << 20
	maxLimitIO     = 1 << 40
	minLimitRate   = 10
	minLimitPIDs   = 128
	maxLimitNumber = 1 << 30
)

func (d *decoder) limits(n *node, l *Limits) {
	d.mapping(n, map[string]func(*node){
		"memory": func(n *node) { l.MemoryBytes = d.size(n, "memory", minLimitMemory, maxMemory) },
		"cpu":    func(n *node) { l.CPUs = d.share(n) },
		"io":     func(n *node) { l.IOBytes = d.size(n, "io", minLimitIO, maxLimitIO) },
		"iops":   func(n *node) { l.IORequests = d.integer(n, "iops", minLimitRate, maxLimitNumber) },
		"pids":   func(n *node) { l.PIDs = d.integer(n, "pids", minLimitPIDs, maxLimitNumber) },
	})
}

// share is a number of processors, maybe less than one: 0.5, or 50%.
func (d *decoder) share(n *node) float64 {
	s, ok := d.scalar(n)
	if !ok {
		return 0
	}
	number, per := s, 1.0
	if p, ok := strings.CutSuffix(s, "%"); ok {
		number, per = p, 100
	}
	v, err := strconv.ParseFloat(number, 64)
	if v /= per; err != nil || !(v >= 0.01 && v <= 1024) {
		d.fault(n, "cpu %q: must be a number of CPUs from 0.01 to 1024, or a part of one such as 50%%", short(s))
		return 0
	}
	return v
}
