// Applies the chosen theme before anything is drawn, so that the page does not flash. The default is the system's.
const chosen = localStorage.getItem("tandem-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
