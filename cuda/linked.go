package cuda

import "github.com/gorun-dev/gorun/cuda/internal/cusys"

// Linked is how many devices the driver shows, and whether it is known that each two of them are joined by a link that carries atomic operations: NVLink. For libraries.
func (d *Device) Linked() (devices int, linked bool) {
	if g, ok := d.plat.(*driverDevice); ok {
		return g.linked()
	}
	return 0, false
}

func (g *driverDevice) linked() (int, bool) {
	n, err := g.drv.DeviceCount()
	if err != nil {
		return 0, false
	}
	devices := make([]cusys.Device, n)
	for i := range devices {
		if devices[i], err = g.drv.Device(i); err != nil {
			return n, false
		}
		for _, peer := range devices[:i] {
			if ok, err := g.drv.PeerAtomics(devices[i], peer); err != nil || !ok {
				return n, false
			}
		}
	}
	return n, n > 1
}
